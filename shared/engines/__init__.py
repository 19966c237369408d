"""Parts that the builtin engine and the host of other engines share."""
