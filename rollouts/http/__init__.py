"""HTTP/1.1 client: request heads, sockets, connections and a connection pool."""
