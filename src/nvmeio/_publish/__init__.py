"""Files and folders that appear under their names whole, or not at all."""
