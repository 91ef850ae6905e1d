"""The black box: the last steps of an engine that failed, as a file, and how they are run again."""
