"""What is made of prompts beside answers: log-probabilities and vectors."""
