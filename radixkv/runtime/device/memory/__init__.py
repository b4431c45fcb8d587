"""Memory of the device and of its host: pools of pages, host slots, and the copies between them."""
