"""The rollout: one agent loop for every text environment, the chat's token form and the ledger of sampled tokens."""
