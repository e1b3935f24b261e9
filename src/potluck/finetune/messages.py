"""Messages of a chat: checked, and as chat templates take them, with tools and with calls of them.

Knows nothing of files nor of tokens.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from potluck.errors import ConfigError
from potluck.words import first_line


def check_chat(fields: Mapping[str, Any], where: str) -> None:
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages is a list of messages, not {shown(messages)}.")
    for message in messages:
        _check_message(message, where)
    if not any(is_answer(message) for message in messages):
        raise ConfigError(
            f"{where} is a chat without an answer: it has no message of the role assistant, and there is nothing to"
            " learn from it. Add the answer, or remove the row."
        )
    try:
        tools = tools_of(fields)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: tools is a list of functions, as JSON schemas: {first_line(error)}.") from None
    check_letters(json.dumps(tools, ensure_ascii=False, default=str), where)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError(f'{where}: a message is {{"role": ..., "content": ...}}, not {shown(message)}.')
    content, calls = message.get("content"), message.get("tool_calls")
    if calls and not (isinstance(calls, list) and all(name_of(call) for call in calls)):
        raise ConfigError(
            f'{where}: tool_calls is a list of {{"function": {{"name": ..., "arguments": {{...}}}}}}, not'
            f" {shown(calls)}."
        )
    if not isinstance(content, str) and not (content is None and calls):
        raise ConfigError(f"{where}: the content of a message is text, not {shown(content)}.")
    check_letters(json.dumps(message, ensure_ascii=False, default=str), where)  # a template may show any of it


def check_letters(text: str, where: str) -> None:
    """JSON may hold half of a letter, as texts have that were cut in the middle of an emoji."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        raise ConfigError(f"{where} has {half}, which is half of a letter. Remove it, or write the whole.") from None


def shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def is_answer(message: Mapping[str, Any]) -> bool:
    """Text, or a call of a tool."""
    return message["role"] == "assistant" and bool((message.get("content") or "").strip() or message.get("tool_calls"))


def name_of(call: Any) -> str:
    """Return the name of the tool that is called; empty: this is no call."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def messages_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert messages to what templates take: null is left out but for the content, and arguments are a table."""
    messages = []
    for message in fields["messages"]:
        known = {name: value for name, value in message.items() if value is not None}
        if calls := known.get("tool_calls"):
            known["tool_calls"] = [_call(call) for call in calls]
        messages.append({"content": None} | known)
    return messages


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Some write its arguments as JSON within a text; a template would put that in quotes once more."""
    function = dict(call.get("function", call))
    if isinstance(arguments := function.get("arguments"), str):
        with suppress(ValueError, RecursionError):  # else it is a text of its own
            function["arguments"] = json.loads(arguments)
    return {"type": "function"} | {k: v for k, v in call.items() if k in ("id", "type") and v} | {"function": function}


def tools_of(fields: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """List the tools that the chat's model could call; some write them as JSON within a text."""
    tools = fields.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"not {shown(tools)}")
    return tools
