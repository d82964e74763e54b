"""Ping-pong: two halves of a micro-batch take turns, so that rows travel while ranks compute."""
