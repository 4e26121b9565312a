#pragma once
#include <vector>

// What check_products.cpp says; the exit status of the program.
int check_products(const std::vector<const char*>& isas);
