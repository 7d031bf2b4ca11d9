//! What a parameter is called in a weights file.

/// Follows a walk through the module and tells the parameter's name in the file.
#[derive(Debug, Default)]
pub(super) struct Names {
    path: Vec<String>,
    /// Types of the enclosing containers.
    containers: Vec<String>,
}

impl Names {
    /// Of what is found under `path`, parts joined by dots.
    pub fn under(path: &str) -> Self {
        let path: Vec<String> = path.split('.').filter(|part| !part.is_empty()).map(str::to_string).collect();
        Self { containers: vec![String::new(); path.len()], path }
    }

    pub fn enter(&mut self, name: &str, container: &str) {
        self.path.push(name.to_string());
        self.containers.push(container.to_string());
    }

    pub fn exit(&mut self) {
        self.path.pop();
        self.containers.pop();
    }

    /// Burn calls a norm's weight `gamma`; Hugging Face calls it `weight` too.
    pub fn current(&self) -> String {
        let name = self.path.join(".");
        name.strip_suffix(".gamma").map_or(name.clone(), |module| format!("{module}.weight"))
    }

    /// Burn's `Linear` holds `[inputs, outputs]`, the file `[outputs, inputs]`.
    pub fn is_transposed(&self) -> bool {
        self.containers.last().is_some_and(|container| container == "Struct:Linear")
    }
}
