"""The inner loop: AdamW, the jitted step, and fragments on the device."""
