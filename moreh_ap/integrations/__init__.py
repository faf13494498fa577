"""Other libraries, each in one file. Decides nothing; must not import any of them itself."""
