"""Pure decisions of a nodeagent: the reaction to each event, and the bookings of its devices."""
