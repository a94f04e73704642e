"""``tagma bench transfer``: what a KV transfer between two churned pools costs to post.

``transfer_pairs.py`` replays a trace on a prefill and a decode pool and notes which blocks each
request's transfer would pair, ``transfer_posting.py`` posts such transfers through the real NIXL.
``transfer_servers.py`` and ``transfer_first_token.py`` measure what two real servers take for a
prompt. ``transfer_run.py`` is the run, ``transfer_result.py`` its result file,
``transfer_command.py`` the command.
"""
