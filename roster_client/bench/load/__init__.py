"""Load generation: requests, their arrival times, and the protocols of the systems under load."""
