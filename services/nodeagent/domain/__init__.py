"""Pure decisions: the reaction to each event, and device bookings."""
