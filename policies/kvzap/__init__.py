"""KVzap: the policy, and training on the scores of KVzip+."""
