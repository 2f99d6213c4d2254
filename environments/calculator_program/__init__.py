"""The calculator as an agent that is a program: two scripts, and the same as an async function."""
