//! Feature rows in the number formats that models produce.
