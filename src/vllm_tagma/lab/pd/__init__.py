"""Prefill and decode on two servers: the small proxy that ``make pd`` puts in front of them."""
