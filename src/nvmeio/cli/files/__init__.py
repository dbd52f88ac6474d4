"""What cp and verify do with files from their beginning to their end."""
