"""Pure decisions: what a nodeagent does about each event, and who holds which bytes of its devices."""
