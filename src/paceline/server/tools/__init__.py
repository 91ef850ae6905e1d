"""What a model's answer says beside its text: reasoning, and calls of tools; a file per format."""
