"""/v1/responses: OpenAI's newer API, as another form of a chat."""
