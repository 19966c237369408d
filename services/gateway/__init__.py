"""The OpenAI endpoint: open HTTP requests, a queue for each model, and a cache of where ready instances are."""
