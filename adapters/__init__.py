"""What people touch: the command line today; HTTP, webhooks and job workers beside it."""
