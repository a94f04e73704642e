"""The worker's side: which slot of the KV cache each scheduled token is written to."""
