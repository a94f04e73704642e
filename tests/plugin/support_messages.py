"""What a message of the support matrix has to say."""

from __future__ import annotations

from vllm_tagma import support

RULES = {rule.id: rule for rule in support.rules()}


def assert_message(findings: list[support.Finding], rule_id: str, value: str) -> None:
    """One finding is of this rule, and its message names the value and the way out."""
    messages = [f.message for f in findings if f.rule.id == rule_id]
    assert len(messages) == 1, [f.rule.id for f in findings]
    message = messages[0]
    assert value in message
    assert RULES[rule_id].way_out in message
    assert message.startswith("--kv-cache-backend tagma does not serve ")
    assert message.endswith(", or use --kv-cache-backend paged.")
