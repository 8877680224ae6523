"""Where tokens and blocks of a paged cache lie, and how they are read and written."""
