"""/v1/messages: the Anthropic API, as another form of a chat."""
