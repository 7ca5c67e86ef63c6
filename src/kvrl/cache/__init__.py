"""KV entries: their lifetimes, the slots that hold them and the policies that evict them."""
