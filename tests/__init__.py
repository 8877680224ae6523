"""The test suite; README.md in this folder is its map."""
