// Stands where LMCache's modules look for libc10, of which they call nothing.
//
// They do call one function of the C++ library that is younger than the one of
// Debian 12: std::string::_M_replace_cold, the slow way of replacing a part of a
// string by text that may lie in that string itself.
#include <cstddef>
#include <string>

extern "C" void _ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE15_M_replace_coldEPcmPKcmm(
    std::string*, char* place, std::size_t old_size, const char* text, std::size_t text_size, std::size_t after) {
  const std::string from(text, text_size);  // moving the rest would change it
  if (after != 0 && old_size != text_size) __builtin_memmove(place + text_size, place + old_size, after);
  from.copy(place, text_size);
}
