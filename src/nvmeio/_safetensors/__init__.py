"""The format of model files: headers, open files, loading, writing."""
