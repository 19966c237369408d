"""The console at /ui: static files, sessions, live updates."""
