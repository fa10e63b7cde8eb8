"""Expected Attention: the policy, and query statistics that `kvbench train` measures and stores."""
