"""Bytes to messages and back. Pure: no sockets, no clock.

encode(message, codec="bincode") -> bytes     a whole frame
decode(payload, codec="bincode") -> message   a payload without its length; WireError if it is not one
"""

from potluck.wire.codec import CODECS, Codec, codec_of, decode, encode
from potluck.wire.frames import FrameReader
from potluck.wire.messages import (
    MESSAGES,
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    BlockGradientPayload,
    GradientPayload,
    Heartbeat,
    JoinAccepted,
    JoinRequest,
    Message,
    NonBlockGradientPayload,
    ShardAssignment,
    Shutdown,
)

__all__ = [
    "CODECS",
    "MESSAGES",
    "AveragedBlockGradient",
    "AveragedGradient",
    "AveragedNonBlockGradient",
    "BlockGradientPayload",
    "Codec",
    "FrameReader",
    "GradientPayload",
    "Heartbeat",
    "JoinAccepted",
    "JoinRequest",
    "Message",
    "NonBlockGradientPayload",
    "ShardAssignment",
    "Shutdown",
    "codec_of",
    "decode",
    "encode",
]
