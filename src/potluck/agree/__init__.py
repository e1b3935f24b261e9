"""When replicas become one again. Pure: no sockets, no clock, no collectives."""
