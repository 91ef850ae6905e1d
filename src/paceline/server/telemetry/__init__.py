"""Spans of requests, for an OpenTelemetry collector; imported where one is named."""
