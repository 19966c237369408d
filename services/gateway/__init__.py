"""The OpenAI endpoint: HTTP requests, a queue for each model, and the route table."""
