"""What `call_pool` is made of: one call, the threads, and one module for each reason why a call waits."""
