"""Parts of `call_pool`: one call, the threads, and one module for each reason why a call waits."""
