"""Suite: the cases of the matrix, as data.  Imports torch nowhere."""
