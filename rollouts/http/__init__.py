"""HTTP/1.1 as a client speaks it: heads of requests, sockets, connections, and those that are kept."""
