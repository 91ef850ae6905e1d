"""The page at /: a look at what the server does, made of files that ask nothing outside."""
