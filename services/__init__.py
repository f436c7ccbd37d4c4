"""The services of Forebay: gateway, scheduler, worker, and the command line that starts them."""
