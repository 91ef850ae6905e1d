"""Contract emulators: vendor libraries as the backends call them, in plain torch, strict."""
