"""The forms in which families of models write tool calls into their text."""
