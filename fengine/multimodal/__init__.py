"""Images: from what a caller gives to pixels, and from pixels to what stands in a prompt."""
