"""`distca verify`: whether attention and transports compute on this machine what they should."""
