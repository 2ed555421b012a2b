"""Background jobs for agent hosts: every state change is one git commit."""
