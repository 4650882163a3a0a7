"""Places the copies of saved activations in Inductor's schedule, and generates the code for them."""
