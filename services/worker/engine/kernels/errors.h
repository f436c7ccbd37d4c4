// The edge to C.
#pragma once
#include <cerrno>
#include <exception>
#include <system_error>

namespace forebay {

// No exception may cross into C: 0, or the errno of what couldn't be had.
template <class F>
inline int guard(F&& f) noexcept {
  try {
    f();
    return 0;
  } catch (const std::system_error& error) {
    return error.code().value();
  } catch (const std::exception&) {  // bad_alloc, or a vector's length_error
    return ENOMEM;
  }
}

}  // namespace forebay
