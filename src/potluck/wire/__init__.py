"""Bytes to messages and back. Pure: no sockets, no clock.

encode(message, codec="bincode") -> bytes     a whole frame
decode(payload, codec="bincode") -> message   a payload without its length; WireError if it is not one
"""
