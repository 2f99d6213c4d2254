"""The calculator as an agent that is a program: two scripts of one's own, and the same as an async function."""
