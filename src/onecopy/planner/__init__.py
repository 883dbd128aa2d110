"""What a plan costs, before anything runs: bytes, traffic and time on a cluster, and the plan that suits it."""
